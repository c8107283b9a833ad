"""A run as a job of SLURM: what was asked for, the batch script, and the talk with SLURM."""
