"""Decisions as pure functions: a snapshot goes in, a choice with its reasons comes out. No clock, no I/O."""
