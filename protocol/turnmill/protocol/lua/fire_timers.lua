-- Moves timers that are due, by the engine's clock, into the results stream. A timer's member is a session's id.
--
-- KEYS   1 timers, 2 results stream of the partition
-- ARGV   most timers to fire
-- Returns  {number fired, the engine's clock in ms}
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local due = call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
for _, session in ipairs(due) do
  call('ZREM', KEYS[1], session)
  call('XADD', KEYS[2], '*', 't', 'timer_fired', 'd', cjson.encode({ session_id = session }))
end
return { #due, now }
