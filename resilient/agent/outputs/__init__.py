"""What ranks print: kept in files beside where it was going, and read again."""
