"""Runs as jobs of SLURM: specification, batch script, and a client of SLURM's programs."""
