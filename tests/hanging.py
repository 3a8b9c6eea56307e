"""Calls that must not wait for ever, as one that opens a pipe might."""

import threading


def within_s(seconds, act):
    """What ``act`` raises; it must not wait for ever."""
    raised = []

    def run():
        try:
            act()
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it waits for a pipe"
    return raised[0] if raised else None
