"""Errors that a person can cause or must act on."""


class UserError(Exception):
    """Wrong input. The message is one line: what is wrong, where, what to do. The command line prints it and exits with 2."""


class NobodyAnswers(UserError):
    """None of the addresses that a person gave leads to a peer."""


class PeerUnreachable(Exception):
    """A peer refused the connection, reset it, or was silent beyond the bound."""


class Refused(Exception):
    """The other peer answered that it will not do this; the message is its reason."""
