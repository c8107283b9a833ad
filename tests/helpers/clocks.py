"""A clock that only the test moves."""


class OwnClock:
    """Seconds that pass when somebody sleeps or says so; the time of day stands still."""

    def __init__(self):
        self.seconds = 1000.0

    def monotonic_seconds(self):
        return self.seconds

    def now_iso(self):
        return "2027-01-15T08:00:00.000Z"

    def sleep(self, seconds):
        self.seconds += seconds
