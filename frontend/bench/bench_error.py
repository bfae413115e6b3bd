"""What stops a whole benchmark, in one line for the person who started it."""


class BenchError(Exception):
    """No server, no such file, a flag that cannot be met; one request's failure is a record."""
