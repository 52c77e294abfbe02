-- Sets a value of a session if it is still what the caller saw: compare and set.
--
-- KEYS   1 the session's values (a hash)
-- ARGV   field, '1' if a value is expected or '0' if none is, the expected value, the new value
-- Returns  'OK' where it was set, else a list of one: the value that is there (false: none)
local current = redis.call('HGET', KEYS[1], ARGV[1])
local expected = ARGV[2] == '1' and ARGV[3]
if current ~= expected then return {current} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[4])
return 'OK'
