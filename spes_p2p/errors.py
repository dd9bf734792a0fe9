"""Errors that a person can cause or must act on."""


class UserError(Exception):
    """Wrong input. The message is one line: what is wrong, where, what to do. The command line prints it and exits with 2."""


class Broken(UserError):
    """No wrong input: the same command can go well when it is given again. The exit code is 1; a supervisor starts it again."""


class NobodyAnswers(UserError):
    """None of the addresses that a person gave leads to a peer."""


class PeerUnreachable(Exception):
    """A peer refused the connection, reset it, or was silent beyond the bound."""


class Refused(Exception):
    """The other peer answered that it will not do this; the message is its reason."""
