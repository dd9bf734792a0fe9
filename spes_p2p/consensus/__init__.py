"""Which commit follows which: single-decree Paxos for each round among the electors that the commit before it names.

State machines without I/O: requests and replies in, messages and durable writes out. The caller makes an output's writes
durable, applies them, and only then sends its reply. The package imports only the wire records and the standard library, so the
same objects run in production, in the simulator and under the exhaustive search (`tests/ballot_model.py`). docs/safety.md has
the safety argument.

    acceptor      promises and votes of one elector
    proposer      the ballots of one coordinator in one attempt
    commit_log    the certified commits from genesis on
    fork          what to do where electors lied and a round was decided twice
    certificate   what proves a commit
    electorate    who votes on a round, who coordinates it, what a majority is
    farewell      electors that give up their seats for a round
    reform        the owner opens a new term when the swarm is stuck
    control       the owner's signed control records
    admission     who may take part, as what: the campaign's rule, invitations, bans
    participant   log, votes and control records of one peer, as recovered from disk
"""
