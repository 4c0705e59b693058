"""The command line. `main` parses and shows errors; a module per noun does the work, over `diamond.sdk`."""
