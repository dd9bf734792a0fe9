"""What a round computes: plan, parts, codecs, the next base, and the accounting of pending updates. No network."""
