"""Task files as text, for clients and the server alike: YAML in and out, without files and without a network."""
