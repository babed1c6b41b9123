"""The configuration: a typed schema, its validation and its composition from recipes."""
