"""Run the same few training steps with every launcher and process count, and compare the weight updates."""
