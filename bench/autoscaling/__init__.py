"""The pools' sizes under several rules, on simulated engines and conversations: `make sim`."""
