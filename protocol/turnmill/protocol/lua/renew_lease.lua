-- Renews or gives back a lease, if it is still the caller's.
--
-- KEYS   1 lease
-- ARGV   owner, ttl in ms (0: give it back)
-- Returns  1 where the lease was the caller's, else 0
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
