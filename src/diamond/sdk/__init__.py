"""The public Python client. `from diamond import Client` is the way in."""
