"""Side by side with peers, in one run; ratios travel between machines, times do not."""
