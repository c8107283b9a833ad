"""``make demo``: a run that is killed and continues, compared with an undisturbed run."""
