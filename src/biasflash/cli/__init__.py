"""The command line: ``biasflash check | bench | demo | explain``."""
