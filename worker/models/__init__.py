"""Model definitions, one file a family, built from the shared layers and found by architecture."""
