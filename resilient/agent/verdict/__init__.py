"""What ended a life, whose fault it was and what follows: values and a table."""
