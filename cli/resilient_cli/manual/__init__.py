"""What ``resilient help`` knows: errors, exit codes, references, storage, configuration."""
