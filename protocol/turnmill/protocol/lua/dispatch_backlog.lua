-- Moves waiting model tasks into the pool's stream, fairest first, while the dispatch window has room.
--
-- KEYS   1 backlog, 2 the backlog's clock, 3 model task stream
-- ARGV   window (most entries in the stream), most tasks to move
-- Returns  {moved, still waiting}
local call = redis.call
local room = math.min(ARGV[1] - call('XLEN', KEYS[3]), ARGV[2] + 0)
local moved = 0
if room > 0 then
  local tasks = call('ZPOPMIN', KEYS[1], room)
  for i = 1, #tasks, 2 do
    call('XADD', KEYS[3], '*', 't', 'model_task', 'd', tasks[i])
    call('HSET', KEYS[2], 'now', tasks[i + 1] % 1e12)
    moved = moved + 1
  end
end
local waiting = call('ZCARD', KEYS[1])
if waiting == 0 then call('DEL', KEYS[2]) end
return { moved, waiting }
