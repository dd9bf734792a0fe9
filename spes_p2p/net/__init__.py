from spes_p2p.net.light_hivemind import skip_training_packages

skip_training_packages()
