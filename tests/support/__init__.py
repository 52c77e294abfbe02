"""What several tests share: waiting for conditions, servers that play a part."""
