"""A miniature HPC centre for tests: real Slurm, unprivileged users, Apptainer and a network that can be spoilt.

See `site.py` for what a site offers and `fixtures.py` for how tests get one; `make site` starts one to play with.
"""

from testing.minihpc.site import Site, available
from testing.minihpc.slurm_conf import Node, Partition, many_cpus

__all__ = ["Node", "Partition", "Site", "available", "many_cpus"]
