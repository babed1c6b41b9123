"""A store's records in a sqlite database: the database, the tasks about it, and the environment with its tools."""
