"""What the server does. Plain functions over a Context; they open their own transactions and know no HTTP."""
