"""What the tests of this room share: sources of every kind, stores, folders that several ranks wrote."""
