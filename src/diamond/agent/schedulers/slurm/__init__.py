"""A Slurm cluster, through its own programs, as an ordinary user."""
