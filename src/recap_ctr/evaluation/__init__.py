"""How good predictions are: metrics, calibration, and the figures that reports hold."""
