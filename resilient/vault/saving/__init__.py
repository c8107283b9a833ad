"""Host bytes to a committed checkpoint: divide, write, agree, commit, let old ones go."""
