"""What the server remembers: rows in the database, bytes in files. Knows nothing of HTTP."""
