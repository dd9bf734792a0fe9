"""A swarm on one machine under faults: in this process with virtual time, or as real processes."""
