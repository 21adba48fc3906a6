"""The parameters of one unit and the buffers behind them."""
