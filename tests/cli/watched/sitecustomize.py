"""Writes to $WATCHED which addresses the interpreter and its forks look up, and which files they open for writing.

Python imports this before anything else where its folder is on PYTHONPATH. What compiled code opens is not seen.
"""

import os
import sys

FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
report = os.open(os.environ["WATCHED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def watch(event: str, arguments: tuple) -> None:
    if event in ("socket.getaddrinfo", "socket.connect", "socket.sendto"):
        os.write(report, f"{event} {arguments}\n".encode())
    elif event == "open" and isinstance(arguments[0], str) and arguments[2] and arguments[2] & FLAGS:
        os.write(report, f"{os.path.abspath(arguments[0])}\n".encode())


sys.addaudithook(watch)
