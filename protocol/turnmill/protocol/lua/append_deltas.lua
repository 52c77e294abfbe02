-- Appends live events of a running model call to its turn's channel and publishes them, if the attempt is still the one
-- that may speak, and exactly once however often the batch is sent.
--
-- KEYS   1 the session's control record, 2 the turn's channel
-- ARGV   live (turn/call/attempt), offset (live events accepted before this batch), now_ms, limit of bytes per attempt,
--        number of events, (type, body)...
-- Returns  the new offset; the old answer where the batch was accepted before; -1 where the attempt was superseded,
--          -2 where the offset leaves a gap, -3 where the attempt has published more than the limit
local call, A = redis.call, ARGV
local record = call('HMGET', KEYS[1], 'live', 'offset', 'size')
if record[1] ~= A[1] then return -1 end
local offset, count = tonumber(record[2] or 0), tonumber(A[5])
if offset == tonumber(A[2]) + count then return offset end
if offset ~= tonumber(A[2]) then return -2 end
local size = 0
if offset > 0 then size = tonumber(record[3] or 0) end
for i = 7, 5 + 2 * count, 2 do size = size + #A[i] end  -- bodies stand at 7, 9, ...
if size > tonumber(A[4]) then return -3 end
local first
local lines = {}
for i = 6, 4 + 2 * count, 2 do
  local id = call('XADD', KEYS[2], 'NOMKSTREAM', '0-*', 't', A[i], 'd', A[i + 1], 'at', A[3])
  if not id then return -1 end
  first = first or id
  lines[#lines + 1] = A[i] .. ' ' .. A[3] .. ' ' .. #A[i + 1] .. '\n' .. A[i + 1] .. '\n'
end
call('SPUBLISH', KEYS[2], string.sub(first, 3) .. '\n' .. table.concat(lines))
call('HSET', KEYS[1], 'offset', offset + count, 'size', size)
return offset + count
