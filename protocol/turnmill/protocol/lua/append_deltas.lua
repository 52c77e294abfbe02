-- Appends live events of a running model call to its turn's channel and publishes them, if the attempt is still the one
-- that may speak, and exactly once however often the batch is sent.
--
-- KEYS   1 the session's control record, 2 the turn's channel
-- ARGV   live (turn/call/attempt), offset (live events accepted before this batch), now_ms, limit of bytes per attempt,
--        number of events, header ('type length' of each event, joined by spaces), type..., body...
-- Returns  the new offset; the old answer where the batch was accepted before; -1 where the attempt was superseded,
--          -2 where the offset leaves a gap, -3 where the attempt has published more than the limit
local call, A = redis.call, ARGV
local record = call('HMGET', KEYS[1], 'live', 'offset', 'size')
if record[1] ~= A[1] then return -1 end
local offset, count = tonumber(record[2] or 0), tonumber(A[5])
if offset == tonumber(A[2]) + count then return offset end
if offset ~= tonumber(A[2]) then return -2 end
local bodies = table.concat(A, '', 7 + count, 6 + 2 * count)
local size = #bodies
if offset > 0 then size = size + tonumber(record[3] or 0) end
if size > tonumber(A[4]) then return -3 end
local first
for i = 7, 6 + count do
  local id = call('XADD', KEYS[2], 'NOMKSTREAM', '0-*', 't', A[i], 'd', A[i + count], 'at', A[3])
  first = first or id
end
-- A channel that is gone (deleted, flushed) stays gone, and the turn goes on without watchers.
if first then call('SPUBLISH', KEYS[2], string.sub(first, 3) .. ' ' .. A[3] .. ' ' .. A[6] .. '\n' .. bodies) end
call('HSET', KEYS[1], 'offset', offset + count, 'size', size)
return offset + count
