"""Who gets which GPUs of a pool: estimates, policies behind one protocol, and a simulator that calls the same ones."""
