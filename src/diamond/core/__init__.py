"""The vocabulary every layer shares. Standard library only; knows no database, network or framework."""
