"""Read rows from files and the Hub, and convert them into examples."""
