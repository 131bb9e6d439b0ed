"""The socket that a server listens on."""

from __future__ import annotations

import errno
import socket
from argparse import ArgumentTypeError


def port(text: str) -> int:
    """Reads the number of a port."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number < 1 << 16:
        raise ArgumentTypeError(f"must be from 0 to 65535, but is {text!r}")
    return number


def listen(host: str, port: int) -> socket.socket:
    """Takes a port, 0 for any that is free, so that nobody else can; errors name the option."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"--port {port} is in use; stop what listens there, or choose another"
        elif error.errno == errno.EACCES:
            why = f"--port {port} is not yours to take; choose one above 1023"
        else:
            why = f"--host {host} is no address of this machine: {error.strerror}"
        raise OSError(why) from error
