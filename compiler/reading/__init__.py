"""A plan file and a model's config.json to a Spec: positions, carets, every problem at once."""
