"""Tools that watch a run: lifetimes of gathered weights, verification across ranks, injected delays."""
