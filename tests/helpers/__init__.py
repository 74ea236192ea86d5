"""What tests share: models, oracles, servers, faults, and programs that they start."""
