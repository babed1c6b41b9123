"""One module a bench: ``HELP`` (one line) and ``run(report)``, which calls ``report(Measurement(...))`` a number."""
