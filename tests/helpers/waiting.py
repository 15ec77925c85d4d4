"""Waits until something has happened."""

import time


def wait_for(condition, seconds: float = 60, alive=lambda: True, text=lambda: "it did not happen") -> None:
    """`alive` is false if it can no longer happen; `text` is then shown."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert alive() and time.monotonic() < deadline, text()
        time.sleep(0.003)
