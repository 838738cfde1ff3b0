def objections(problem): return ("not yet",)
def describe(problem): return ()
