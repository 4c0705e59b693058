"""This machine as its own batch scheduler: a queue, slots for cores, memory and GPUs, and processes."""
