-- Makes a session out of a part of another one's transcript: the fork's transcript, values and record come to be together,
-- or not at all. The source is only read.
--
-- KEYS   1 the source's transcript, 2 its values, 3 the fork's record, 4 its transcript, 5 its values, 6 the names of its
--        blobs, 7 the partition's timers, 8.. the blobs that were copied for it
-- ARGV   the fork's id, state, writer, number of ranges, (first, end)..., number of changed entries, (index in the fork, entry)...,
--        names of the copied blobs...
-- Returns  the length of the fork's transcript; -1 where the fork exists already, -2 where the source does not reach as
--        far as the last range (it was deleted)
local call = redis.call
if call('EXISTS', KEYS[3], KEYS[4]) > 0 then return -1 end
local ranges = ARGV[4] + 0
local a = 5 + 2 * ranges
if ranges > 0 and call('LLEN', KEYS[1]) < ARGV[a - 1] + 0 then return -2 end
for range = 0, ranges - 1 do
  local first, last = ARGV[5 + 2 * range] + 0, ARGV[6 + 2 * range] - 1
  for start = first, last, 1000 do
    call('RPUSH', KEYS[4], unpack(call('LRANGE', KEYS[1], start, math.min(last, start + 999))))
  end
end
for _ = 1, ARGV[a] + 0 do
  call('LSET', KEYS[4], ARGV[a + 1], ARGV[a + 2])
  a = a + 2
end
call('DEL', KEYS[5])
call('COPY', KEYS[2], KEYS[5])
for blob = 8, #KEYS do
  call('PERSIST', KEYS[blob])
  call('SADD', KEYS[6], ARGV[a + blob - 7])
end
call('HSET', KEYS[3], 'v', 1, 'w', ARGV[3], 's', ARGV[2])
-- A coordinator looks at it once, and notes that it is idle from now on.
call('ZADD', KEYS[7], 0, ARGV[1])
return call('LLEN', KEYS[4])
