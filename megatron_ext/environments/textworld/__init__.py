"""Games of the ``textworld`` package, made from facts and played by its own engine, without its compiler."""
