-- Makes a stream anew whose ids were moved far into the future, up to the last one: nobody could add to it any more. All
-- that it holds gets ids of now, in its order; what was delivered and not acknowledged is delivered once more.
--
-- KEYS   1 the stream
-- ARGV   its group, the time in ms from which on an id is of the future
-- Returns  the number of entries with new ids, nil where the stream is in order
local call, stream = redis.call, KEYS[1]

if call('EXISTS', stream) == 0 then return false end
local info, last = call('XINFO', 'STREAM', stream), '0-0'
for i = 1, #info, 2 do
  if info[i] == 'last-generated-id' then last = info[i + 1] end
end
if tonumber(string.match(last, '^%d+')) < ARGV[2] + 0 then return false end
local entries = call('XRANGE', stream, '-', '+')
call('DEL', stream)
call('XGROUP', 'CREATE', stream, ARGV[1], '0', 'MKSTREAM')
-- More fields than this has no message of ours, and no call can have many more.
for _, entry in ipairs(entries) do call('XADD', stream, '*', unpack(entry[2], 1, math.min(#entry[2], 200))) end
return #entries
