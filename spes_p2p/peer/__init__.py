"""One peer of a swarm, from its first contact to its farewell. Read from the top:

    life                 get the base, then train and take part in rounds until the end
    phases               the local steps between two rounds; `samples` says which ones
    attempt              the member's side of a round; `announcing` says what it brings
    coordinator_service  who is let into the round that this peer coordinates
    coordinator          one attempt: `gathering` members, `collecting` reports, deciding
    exchange             push updates, reduce, pull results; `exchanges` holds those of a round
    replica              apply decided rounds or take another base, with `own_work` on top;
                         `base_store`, `newest_base` and `kept_results` are its parts
    node                 what all of these share: contacts, `decisions` (on `durable` files), `departures`
    validity             which plans and commits this peer takes; `patience` and `courtesy` say for how long it waits
    checking, judging, auditing, guard   find wrong means, harmful steps, phases that nobody trained, a loss that runs away
    reforming, leaving, evaluation, history_sync, reporter   services beside the rounds
"""
